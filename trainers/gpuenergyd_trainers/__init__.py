"""How training programs join: one file per framework, each with `attach(object, job=...) -> Handle`.

across_hosts      pipelines and replicas that span hosts
autostart         joins unchanged programs: `gpuenergyd run`
deepspeed         a DeepSpeed PipelineEngine
demo              the demo's training program
huggingface       the Hugging Face Trainer, one clock per optimizer step
joining           how adapters attach to a framework
lightning         lightning, one clock per batch
loop              any other loop, one clock per iteration
megatron          a Megatron-core configuration
timing            instruction times: CUDA events and simulated GPUs
torch_inflight    1F1B with extra microbatches in flight
torch_pipelining  any torch.distributed.pipelining schedule
"""

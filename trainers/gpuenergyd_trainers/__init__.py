"""Adapters for training programs: one module per framework, with `attach(object, job=...) -> Handle`.

across_hosts      pipelines and replicas that span hosts
autostart         attachment of unmodified programs: `gpuenergyd run`
deepspeed         a DeepSpeed PipelineEngine
demo              the demo's training program
huggingface       the Hugging Face Trainer, one clock per optimizer step
joining           registration, wrapping and handles, shared by all adapters
lightning         the Lightning Trainer, one clock per batch
loop              any other loop, one clock per iteration
megatron          a Megatron-core configuration
timing            timers for CUDA devices and simulated GPUs
torch_inflight    1F1B with extra microbatches in flight
torch_pipelining  any torch.distributed.pipelining schedule
"""

"""How training programs join: one file per framework, each with `attach(object, job=...) -> Handle`.

torch_pipelining  any torch.distributed.pipelining schedule
torch_inflight    1F1B with extra microbatches in flight
megatron          a Megatron-core configuration
deepspeed         a DeepSpeed PipelineEngine
lightning         Lightning, one clock per batch
huggingface       the Hugging Face Trainer, one clock per optimizer step
loop              any other loop, one clock per iteration
across_hosts      a pipeline whose ranks sit on several hosts
replica_paces     replicas on several hosts that tell each other how fast they are
store_thread      a thread that talks to the job's own store; job_store, the store
own_daemon        this host's daemon, asked from such a thread
ordered_rank      a rank whose order of instructions is learned and checked
cuda_timing       instruction times from CUDA events
handle            what `attach` returns
wrapping          methods wrapped on one object, undone without a trace
autostart         joins programs that were not changed: `gpuenergyd run`
simulated_timing  when simulated work was over, as CUDA events tell of real work
simulated_stage   pipeline stages that take as long as a simulated GPU makes them
gpt_model         the demo's model, data and what its stages cost on a simulated GPU
gpt_pipeline      that model under any of torch's schedules, a rank at a time
gpt_demo          a small GPT in a real torch pipeline, one process per stage
"""

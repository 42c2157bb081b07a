"""How training programs join: one file per framework, each with `attach(object, job=...) -> Handle`.

torch_pipelining  any torch.distributed.pipelining schedule
loop              any other loop, one clock per iteration
cuda_timing       instruction times from CUDA events
wrapping          methods wrapped on one object, undone without a trace
simulated_stage   pipeline stages that take as long as a simulated GPU makes them
gpt_demo          a small GPT in a real torch pipeline, one process per stage
"""

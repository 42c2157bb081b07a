"""The demo's training program.

gpt              the command line: starts and runs the ranks
gpt_model        its model and data
gpt_pipeline     the model under any schedule of torch
simulated_stage  stages with the durations of a simulated GPU
"""

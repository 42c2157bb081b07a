"""The demo's training program.

gpt              the demo's training program
gpt_model        its model and data
gpt_pipeline     the model under any schedule of torch
simulated_stage  stages that take as long as a simulated GPU makes them
"""

"""Pipelines and plans: schedules, profiles, timelines and the SM clock of every instruction.

explanation  explanation of each instruction's clock
graph        instructions, schedules and the dependency graph between them
plan         an SM clock for every instruction, and the clock changes that apply it
profile      measured time and energy of each kind of instruction at each SM clock
schedules    schedules by name: gpipe, 1f1b, interleaved, zero-bubble
switching    switch latencies, estimated from the clock changes that a job makes
timeline     graph + durations -> start, end, slack, critical path, bubbles, energy
"""

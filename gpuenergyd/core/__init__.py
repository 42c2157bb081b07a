"""The domain: pipelines, profiles, plans, targets and the life of a job. Standard library only, no I/O, no clock.

Pipelines and plans
  pipeline      instructions, schedules and their dependency graph; schedules, those by name
  profile       measured time and energy of each kind of instruction at each SM clock
  timeline      graph + durations -> start, end, slack, critical path, bubbles, energy
  plan          an SM clock for every instruction, and the clock changes that bring it about
  switching     how long clock changes take, learned from those that a job makes anyway
  target        what performance is owed; slowdown_account, what of it is spent
  policy        the plugin API: Protocols and the frozen views they get
  explanation   why an instruction runs at its clock

The life of a job
  job           its state machine: messages in (what happened) and out (what shall be done)
  job_description, job_rules  what a job is, and how it is run
  rank_reports  from single ranks' reports to whole iterations
  issued_plans, remembered_iterations  what the job has been given and has shown, bounded
  guard, faults  what is wrong with a plan, and when its policy gets another chance
  savings       what the un-tuned job is, and what tuning is measured to save
  model_memory  what one run leaves for the next; measured_frontier, what it has really run at

What is measured
  telemetry     samples, counters, and what an iteration cost; ledger, whose every joule is
  observation   what one iteration showed: instruction times at clocks, energy per GPU
  stragglers    which replica holds up the others; pace, what each would take alone; extrinsic, what following it saves
  agreement     which plan all ranks follow when they sit on several hosts; merging, what they saw as a whole

The grid
  carbon        intensities and what they mean, forecasts, grams, what to believe when a source is silent
  carbon_clock, carbon_account, carbon_skill  which hour it is, what was saved, how good forecasts were
  carbon_replay  what is asked of a replay of past traces and what it answers
  speed_curve   the only points of a frontier worth running or mixing

The host
  host          what was looked up about a host that is to run the daemon; diagnosis, what is wrong with it
"""

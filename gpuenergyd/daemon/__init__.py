"""The core: who trains, what is measured and decided, who is told; and the processes beside it.

Put together
  app           the daemon, started in order, watched over and stopped
  settings      what an administrator can set, with default_config.toml
  ports         what a running job needs of the daemon around it
  listening, peers  Unix sockets, and who is at their other end
  hand_over, taking_over  what a core that is restarted leaves to the next one

Jobs
  jobs          who takes part in which: checked_messages what they say, rank_sessions who they are, clock_records what
                they wish
  job_runner    one job in motion: job_clocks its leases, plan_slices what its ranks follow, observing what they showed,
                control_trail who changed what; model_memory what earlier runs showed
  job_tags, job_length, job_budget  whose it is, how long, and what it may still spend
  replicas      the replicas of one training; parts and whole_pipeline, pipelines across hosts

GPUs
  gpus          what is known of each; gpu_history, what is kept of it; host_energy, what the rest of the host uses
  gpu_leases    GPUs held outside any job: by an administrator, or by zeusd_wishes of programs written for zeusd
  access, gpu_use  who may have GPUs changed, and proof that somebody runs there

Asked from outside
  server        HTTP on the socket; api_description says what it serves, status and metrics what the daemon is doing
  clock_socket  clocks asked for inside an iteration
  zeusd, zeusd_parameters, zeusd_description  the routes of the Zeus project's daemon
  otlp          the metrics for an OpenTelemetry collector, by a process of its own
  limits, connection_guard, fair_turns, snapshots, log_flood  nobody's flood is anybody else's wait

Processes beside the core
  starting      how they come to be; succession, how soon they are replaced; children, the GPU worker
  policy_link   the core's side of the policy host: view_difference what is sent, policy_host the process, policy_guard
                its unit, plugins the only door
  carbon_fetcher, fetcher_unit, worker_unit  the other units

The grid
  carbon_service  all of it; carbon_feed its values, carbon_questions what the policy host is asked
  carbon_targets  what following_jobs owe, seen through target_view; carbon_shown and carbon_memory, what is said, kept

Keeping well
  periodic      what is done by the clock; sleep_watch, a host that slept
  pauses, memory  a short pause of the event loop at most, and a small process
"""

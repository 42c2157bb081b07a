"""GPUs: reading them, controlling them, and making sure that they come back.

device             the Protocols: reading and controlling are two rights
drivers            opens the one that is asked for
nvml               real GPUs; nvml_errors says what each return code means
simulated          GPUs that exist as a model in a file that daemon and training processes share
                   (simulated_world the file, device_model the formulas, device_parameters the numbers)
worker             the privileged process: the only one that changes a GPU
                   (supervisor its main thread, core_connection its socket, gpu_states what each GPU is fit for,
                   leases, journalled_changes, giving_back with its restore_orders; worker_options how it was started,
                   keeping what it holds while the core is restarted, questions what it may be asked);
                   driver_threads are the two that call the driver and may be stuck (driver_thread): actuator sets,
                   sampling reads, clock_effect says when a clock is there,
                   foreign_locks and xid_watch notice what others did; its keeper restores when it is killed
energy_edges       when a counter was updated
link               the core's side of the worker; link_messages is what they say
journal            what to restore, on disk before the first change; restoring puts it back, by the restore_rules
restore            the same for `gpuenergyd restore`, without a worker
process_identity   telling processes and boots apart
"""

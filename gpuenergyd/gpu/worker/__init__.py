"""The GPU worker: the only privileged process, and the only one that changes GPUs.

daemon_connection  the worker's end of the link to the daemon
driver_requests    driver calls that the daemon requests, journalled before each change
health             health of each GPU, and why one must not be changed
lease_handover     keeps leases while the daemon restarts
leases             leases of GPUs, and the processes whose death ends one
main               the process: `python -m gpuenergyd.gpu.worker.main`
restore_requests   restore requests for several GPUs, complete when the last GPU is done
restore_sentinel   the process that restores GPUs when the worker was killed
restore_service    restores GPUs in the running worker, and retries
supervisor         the main thread: serves the daemon, grants leases, supervises the driver threads
threads            the driver threads, and the computations on their readings
"""

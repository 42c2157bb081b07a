"""The GPU worker: the only privileged process, and the only one that changes GPUs.

daemon_connection  its end of the link to the daemon
health             which GPUs can be read and changed, and why not
lease_handover     keeps leases while the daemon restarts
leases             which lease each GPU is under
main               the process: `python -m gpuenergyd.gpu.worker.main`
options            its command line
restore_requests   restore requests for several GPUs, answered when the last is done
restore_sentinel   a process that restores GPUs when the worker was killed
restore_service    restores GPUs in the running worker
supervisor         its main thread: serves the daemon, keeps leases, watches the driver threads
threads            the worker's driver threads, and what they compute on
"""

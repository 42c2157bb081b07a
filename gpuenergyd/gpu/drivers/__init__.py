"""GPU drivers: NVML and the simulated one.

device_model       speed, power, heat and energy of a simulated GPU
device_parameters  the parameters of each simulated GPU model, with sources
nvml               real GPUs, through NVML
nvml_errors        NVML return codes as errors of this project
opening            opens the driver that is asked for
simulated          simulated GPUs, and the workload side that training processes use
simulated_world    the shared file in which simulated GPUs live
"""

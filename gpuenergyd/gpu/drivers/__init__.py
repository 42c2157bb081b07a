"""GPU drivers: NVML and the simulated one.

device_model       speed, power, heat and energy of a simulated GPU
device_parameters  the parameters of each simulated GPU model, with sources
nvml               the driver of real GPUs, through NVML
nvml_errors        NVML return codes as errors of this project
opening            selection of a driver by name
simulated          the driver of simulated GPUs, with computing for simulated training processes
simulated_world    the world file that holds the simulated GPUs
"""

from tests.gpu.conftest import gpu_models, host, real_time_host, virtual_time

__all__ = ["gpu_models", "host", "real_time_host", "virtual_time"]

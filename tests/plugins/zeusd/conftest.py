"""The fake driver library, which zeus's own package loads."""

from tests.gpu.conftest import fake_nvml_library

__all__ = ["fake_nvml_library"]

"""`gpuenergyd evaluate`: runs policies on the same virtual training and compares energy, time and regret."""

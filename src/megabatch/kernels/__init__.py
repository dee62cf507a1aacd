"""The Triton engine: kernels for NVIDIA GPUs and the code that launches them."""

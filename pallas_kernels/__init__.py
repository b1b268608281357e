"""GPU kernels, one folder an operation: api, reference, implementations, cases. Knows nothing of kairox_jax."""

"""GPU kernels, one folder an operation: api, reference, implementations, cases; know nothing of kairox_jax."""

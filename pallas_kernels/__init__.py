"""GPU kernels, one folder an operation: api, reference, implementations, cases."""

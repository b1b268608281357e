"""Kairox for JAX: activation-sparse language models on a GPU that cannot hold them."""

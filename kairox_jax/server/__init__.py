"""The OpenAI-compatible server and its page. Needs the extra ``server``."""

from kairox_jax.server.app import Service, make_app
from kairox_jax.server.run import serve
from kairox_jax.server.settings import ServerSettings

__all__ = ["ServerSettings", "Service", "make_app", "serve"]

"""The HTTP interface of the hold service, as an aiohttp application.

A request passes metrics, problems and auth (middlewares, in that order), is read into one of `models`,
and becomes one call of `expiry.holds` on a pooled connection.
"""

from expiry.api.app import make_app, make_health_app
from expiry.api.server import serve

__all__ = ["make_app", "make_health_app", "serve"]

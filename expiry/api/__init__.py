"""The HTTP interface of the hold service, as an aiohttp application.

A request passes the middlewares metrics and problems. Its `Operation` checks the key, reads the body or the query into
a model of `expiry.wire`, and calls the handler, which works on a pooled connection.
"""

from expiry.api.app import make_app, make_health_app
from expiry.api.server import serve

__all__ = ["make_app", "make_health_app", "serve"]

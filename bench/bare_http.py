"""What the HTTP library alone can do: aiohttp that reads the JSON of a place and answers as long a document."""

import asyncio
import json

import uvloop
from aiohttp import web

ANSWER = {
    "id": "00000000-0000-7000-8000-000000000000",
    "state": "held",
    "generation": 1,
    "items": [{"resource_id": "room-1", "quantity": 1}],
    "holder": None,
    "external_ref": None,
    "metadata": {},
    "placed_at": "2026-01-01T00:00:00.000000Z",
    "expires_at": "2026-01-01T00:15:00.000000Z",
    "expires_in_s": 900.0,
    "renewals": 0,
    "max_renewals": None,
    "lifetime_ends_at": None,
    "ended_at": None,
    "ended_by": None,
    "server_time": "2026-01-01T00:00:00.000000Z",
}


async def place(request: web.Request) -> web.Response:
    """Answer without having done anything."""
    await request.json()
    return web.json_response(ANSWER, status=201)


async def main() -> None:
    """Serve until ended; say the port."""
    app = web.Application()
    app.router.add_post("/v1/holds", place)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(json.dumps({"event": "http.listening", "port": runner.addresses[0][1]}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())

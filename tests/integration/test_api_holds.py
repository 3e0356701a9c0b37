from __future__ import annotations
from tests.api_client import Api, problem, read, make_overdue

async def test_smoke(api, pool):
    r = await api.place(external_ref="cart-77", metadata={"a": 0.1})
    print(r.status, dict(r.headers), await r.text())
    h = await read(r)
    print(await api.hold(h))
    for v, b in (("renew", {"ttl_s": 100}), ("confirm", {}), ("confirm", {}), ("return", {"reason": "x"}), ("release", {})):
        r = await api.verb(h, v, **b)
        print(v, r.status, await r.text())
    print(await api.declare("room-12%2F2026"), await api.resource("room-12%2F2026"))
    for p in ("/healthz", "/readyz", "/nothing", "/v1/overview"):
        r = await api.ask("GET", p, key="exk_platform")
        print(p, r.status, await r.text())
    r = await api.ask("POST", "/v1/loops/sweep/pause", key="exk_platform", json={"reason": "x"})
    print(r.status, await r.text())
    r = await api.ask("DELETE", "/v1/holds")
    print(r.status, await r.text())
    r = await api.ask("GET", "/metrics")
    print([l for l in (await r.text()).splitlines() if l.startswith("expiry_api_requests_total") and not l.endswith(" 0.0")])

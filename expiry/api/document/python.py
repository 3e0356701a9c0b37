"""Each operation as a call of `expiry.client`, for those who read of it in the terms of HTTP."""

CALLS = {
    "holds_place": "await client.place(resource_id, quantity, ttl_s=900, external_ref=order_id)",
    "holds_list": 'async for hold in client.holds(state="held", resource_id=resource_id): ...',
    "holds_get": "await client.get(hold.id)",
    "holds_get_history": "await client.history(hold.id)",
    "holds_renew": "await client.renew(hold.id, ttl_s=900)",
    "holds_confirm": "await client.confirm(hold.id)",
    "holds_release": 'await client.release(hold.id, reason="cart emptied")',
    "holds_return": 'await client.return_(hold.id, reason="refund")',
    "batches_place": "await client.place_batch([Wanted(items=[Item(resource_id)], ttl_s=900)], atomic=True)",
    "batches_release": 'await client.release_batch([hold.id], reason="shop closed")',
    "resources_put": "await client.declare(resource_id, capacity=100)",
    "resources_get": "await client.resource(resource_id)",
    "resources_list": "async for resource in client.resources(prefix): ...",
    "events_list": "async for event, cursor in client.follow(after=kept): ...",
    "keys_create": 'await client.create_key(tenant_id="shop", scopes=["holds", "read"])',
    "keys_list": "async for key in client.keys(tenant_id): ...",
    "keys_revoke": "await client.revoke_key(key.id)",
    "operations_get_overview": "await client.overview()",
    "operations_pause": 'await client.pause("sweep", reason="database maintenance")',
    "operations_resume": 'await client.resume("sweep")',
}

"""Prometheus metrics: typed instruments per role.

    rpc, pool = RpcMetrics.create(registry), PoolMetrics.create(registry)       # of runtime.observe.exposition

A role creates only the instrument sets that it updates. Labels never contain values that a client
chose.
"""

"""Ways to processes on this machine, past any proxy that the environment names."""

from urllib.request import ProxyHandler, build_opener

PAST_PROXIES = (("grpc.enable_http_proxy", 0),)  # options of a gRPC channel


def local_page(url: str, *, timeout_s: float = 60.0) -> str:
    """Return what is served at `url`. Raises OSError when nothing is."""
    with build_opener(ProxyHandler({})).open(url, timeout=timeout_s) as response:
        text: str = response.read().decode()
    return text

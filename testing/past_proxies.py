"""Access to processes on this machine that ignores proxy settings of the environment."""

from urllib.request import ProxyHandler, build_opener

PAST_PROXIES = (("grpc.enable_http_proxy", 0),)  # options of a gRPC channel


def local_page(url: str, *, timeout_s: float = 60.0) -> str:
    """Return the text served at `url`.

    Raises:
        OSError: nothing is served there.
    """
    with build_opener(ProxyHandler({})).open(url, timeout=timeout_s) as response:
        text: str = response.read().decode()
    return text

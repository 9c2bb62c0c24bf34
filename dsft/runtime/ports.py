"""TCP ports of this machine."""

import psutil


def port_owner(port: int) -> str:
    """The process that listens there, as far as this user may know."""
    try:
        connections = [entry for entry in psutil.net_connections("inet") if entry.status == psutil.CONN_LISTEN]
        pid = next((entry.pid for entry in connections if entry.laddr.port == port), None)
        return f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:120]})" if pid else "another user's process"
    except (psutil.Error, OSError):
        return "another process"

"""TCP ports of this machine."""

import psutil

from dsft.errors import shown_command


def port_owner(port: int) -> str:
    """The process that listens there, as far as this user may know."""
    try:
        connections = [entry for entry in psutil.net_connections("inet") if entry.status == psutil.CONN_LISTEN]
        pid = next((entry.pid for entry in connections if entry.laddr.port == port), None)
        if pid is None:
            return "another user's process"
        command = " ".join(shown_command(psutil.Process(pid).cmdline()).split())
        return f"process {pid} ({command[:120]})"
    except (psutil.Error, OSError):
        return "another process"

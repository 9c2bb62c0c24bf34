"""The test hosts are what they claim: separate machines to each other, and no change to this one."""

import signal
import time
from pathlib import Path


def test_hosts_have_own_names_addresses_and_files(hosts):
    command = (
        "hostname; hostname -I; pwd; ls -d /dev/shm/mine* /tmp/mine 2>/dev/null; touch /dev/shm/mine-$(hostname)"
        " /tmp/mine"
    )
    seen = [host.run(["bash", "-c", command]).stdout.split() for host in hosts]
    assert [words[:2] for words in seen] == [
        ["node-0", "10.77.0.1"],
        ["node-1", "10.77.0.2"],
        ["node-2", "10.77.0.3"],
        ["node-3", "10.77.0.4"],
    ]
    assert all(len(words) == 3 for words in seen), seen  # nobody saw another's files
    assert not list(Path("/dev/shm").glob("mine-*"))


def test_a_cut_host_is_lost_silently_and_comes_back(hosts):
    listening = hosts[1].start(
        [
            "python",
            "-uc",
            (
                "import socket; s = socket.create_server(('', 5000)); print('up'); c, _ = s.accept(); print(c.recv(9));"
                " print(c.recv(9))"
            ),
        ]
    )
    assert listening.stdout.readline() == "up\n"
    assert not hosts[1].port_is_free(5000) and hosts[0].port_is_free(5000)
    sender = (
        "import signal, socket, time; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]);"
        " c = socket.create_connection(('node-1', 5000)); c.send(b'a'); print('sent', flush=True);"
        " signal.sigwait([signal.SIGUSR1]); c.send(b'b'); print('sent', flush=True); time.sleep(600)"
    )
    sending = hosts[0].start(["python", "-c", sender])
    assert sending.stdout.readline() == "sent\n" and listening.stdout.readline() == "b'a'\n"
    hosts[1].cut()
    sending.send_signal(signal.SIGUSR1)
    assert sending.stdout.readline() == "sent\n"
    time.sleep(0.5)
    assert sending.poll() is None and listening.poll() is None  # neither has noticed
    hosts[1].heal()
    assert listening.stdout.readline() == "b'b'\n"  # the kernel sent it again

"""The smoke test's ranks: what they import, and how lost packets are counted."""

import subprocess
import sys

from conftest import ROOT

from dsft.doctor.smoke import tcp_segments


def test_the_smoke_tests_ranks_import_torch_alone():
    code = "import sys, dsft.doctor.smoke; assert not {'transformers', 'deepspeed'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_segment_that_had_arrived_already_is_not_lost(tmp_path):
    """A busy machine acknowledges so late that the other side sends again."""
    (tmp_path / "snmp").write_text("Tcp: OutSegs RetransSegs\nTcp: 1000 30\nUdp: InDatagrams\nUdp: 5\n")
    for duplicates, lost in ((0, 30), (28, 2), (40, 0)):
        (tmp_path / "netstat").write_text(
            f"TcpExt: TCPDSACKRecv TCPTimeouts\nTcpExt: {duplicates} 7\nIpExt: A\nIpExt: 1\n"
        )
        assert tcp_segments(tmp_path) == (1000, lost)

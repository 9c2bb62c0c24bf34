"""One page about finished, running and failed runs: what is known of them, charts, tables, HTML."""

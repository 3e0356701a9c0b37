"""The bench: laws against a modelled database in virtual time, judged beside an oracle."""

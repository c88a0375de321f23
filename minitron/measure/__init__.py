"""The instruments: ledger (bytes sent), meter (bytes held), clock (speed and MFU), and traces."""

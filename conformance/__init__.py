"""What happened: operations, backends, isolated workers, the ledger, the pytest plugin and the command line."""

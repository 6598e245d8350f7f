"""What travels between client and upstream, as bytes and plain data. Pure: no I/O, no clock."""

"""Process group, devices, hosts."""

"""Native objects of pynixlkv: agents, registrations, transfers."""

"""Running models: device state of the slots, model passes, and the one place where the host waits for the device."""

"""One copy of the weights per device, held by nothing but the kernel."""

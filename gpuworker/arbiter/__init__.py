"""What runs before the fork, in gunicorn's arbiter: no CUDA, no thread, and nothing raised into the arbiter's loop."""

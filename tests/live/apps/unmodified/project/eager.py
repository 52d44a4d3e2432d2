"""The same with the views imported at once, so that no request waits for the model."""

import project.urls  # noqa: F401
from project.wsgi import application  # noqa: F401

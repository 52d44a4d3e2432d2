SECRET_KEY = "of a test"
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "project.urls"
WSGI_APPLICATION = "project.wsgi.application"
USE_TZ = True

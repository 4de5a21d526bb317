"""Many engines behind one address: replicas as a Ray Serve application. Only `application` and `router` import Ray."""

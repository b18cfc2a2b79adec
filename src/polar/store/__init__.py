"""Tables, migrations and blobs; the only room that knows SQL."""

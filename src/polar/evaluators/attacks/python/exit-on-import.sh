# Code under test that ends its process well as soon as it is imported.
echo 'import os; os._exit(0)' | begin_sources_with

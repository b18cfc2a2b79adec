# Another command as the script `test` of package.json.
set_in_package_json scripts.test '"true"'

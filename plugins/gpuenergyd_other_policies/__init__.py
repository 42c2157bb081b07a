"""Plugin `other_policies`: the policies beside the default one and full speed, and their offline planners."""

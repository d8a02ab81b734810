"""What happens before and around the ranks?"""

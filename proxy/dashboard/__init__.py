"""The dashboard at `/ui`: pages for people, each also as JSON and CSV. Read-only, except for deleting sessions.

    routes      the paths; start here
    access      sign-in, the session cookie, the CSRF token; errors as pages; security headers
    render      renders a page as HTML, JSON or CSV; static files
    text        formats numbers, times, untrusted texts and differences
    sessions    the list of sessions, comparison of two sessions
    session     one session: the history beside what was sent
    overview    what was paid, what would have been paid, and the sources of the difference
    cache       causes of misses of the provider's cache; declared and called tools
    policies    the configuration, and the policy lab

Expensive steps are pure functions of the data that was read: `… -> Page`. A page's data is what `.json` returns and
what the template shows.
"""

from __future__ import annotations

from proxy.dashboard.routes import router

"""What a person can do about an error of AWS, by its code. Words only; may not do I/O."""

from __future__ import annotations

from collections.abc import Mapping

from autoscaler.ports import PortError

LOGIN = "renew the credentials (an instance profile renews its own), or set AWS_PROFILE"
POLICY = "give the controller's role the statement that deploy/README.md lists for this call"
REGION = "correct `region`, or enable the region for the account"
NETWORK = "check the route, the proxy and the VPC endpoint, then start again"
TEMPLATE = "correct `launch_template`, or deploy the stack of deploy/ in this region"
IMAGE = "build the image again (deploy/ami) and name it in the launch template or as `image`"
CLOCK = "set the machine's clock: AWS refuses requests that are more than five minutes off"

REMEDIES: Mapping[str, str] = {
    "ExpiredToken": LOGIN,
    "ExpiredTokenException": LOGIN,
    "RequestExpired": f"{LOGIN}; or {CLOCK}",
    "NoCredentialsError": LOGIN,
    "PartialCredentialsError": LOGIN,
    "CredentialRetrievalError": LOGIN,
    "InvalidClientTokenId": LOGIN,
    "UnrecognizedClientException": LOGIN,
    "AuthFailure": f"{LOGIN}; {REGION}",
    "SignatureDoesNotMatch": f"{LOGIN}; or {CLOCK}",
    "UnauthorizedOperation": POLICY,
    "AccessDenied": POLICY,
    "AccessDeniedException": POLICY,
    "OptInRequired": REGION,
    "ProfileNotFound": LOGIN,
    "ConfigParseError": "correct the file, or name another by AWS_CONFIG_FILE",
    "TokenRetrievalError": LOGIN,
    "SSOTokenLoadError": LOGIN,
    "UnauthorizedSSOTokenError": LOGIN,
    "ValueError": "correct AWS_ENDPOINT_URL, or unset it",
    "SSLError": f"correct the address (http or https) or AWS_CA_BUNDLE; {NETWORK}",
    "HTTPClientError": f"{NETWORK}; if it names a header, {LOGIN}",
    "EndpointConnectionError": f"{REGION}; {NETWORK}",
    "InvalidRegionError": REGION,
    "NoRegionError": REGION,
    "ConnectTimeoutError": NETWORK,
    "ReadTimeoutError": NETWORK,
    "ConnectionClosedError": NETWORK,
    "ResponseParserError": f"something else than AWS answered; {NETWORK}",
    "InvalidAMIID.NotFound": IMAGE,
    "InvalidAMIID.Malformed": IMAGE,
    "InvalidLaunchTemplateName.NotFoundException": TEMPLATE,
    "InvalidLaunchTemplateId.NotFound": TEMPLATE,
    "InvalidSubnetID.NotFound": "correct `subnets`: this one is not there",
    "InsufficientFreeAddressesInSubnet": "give the zone a larger subnet",
    "RequestLimitExceeded": "wait a minute; if it lasts, ask AWS for a higher API limit",
    "VcpuLimitExceeded": "ask for a higher limit at Service Quotas",
    "MaxSpotInstanceCountExceeded": "ask for a higher limit of spot at Service Quotas",
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": "create the role: aws iam create-service-linked-role "
    "--aws-service-name spot.amazonaws.com",
}
UNKNOWN = "look the code up in AWS's API reference"


def remedy(code: str) -> str:
    """What to do about `code`."""
    return REMEDIES.get(code, NETWORK if code.startswith("HTTP") or code.isdigit() else UNKNOWN)


def told(where: str, error: PortError) -> str:
    """``where: what is wrong (code); what to do``."""
    return f"{where}: {error} ({error.code}); {remedy(error.code)}"

"""What else the controller asks AWS for: events from a queue (SQS), limits (Service Quotas), who it is (STS).

Pure; may not do I/O or read a clock. A message that was received and not deleted comes again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from chaos.ec2_server.call import Action, Call
from chaos.ec2_server.state import Message, Refusal, Region

VISIBLE_AFTER_S = 30.0
MOST = 10
QUOTAS = {
    "L-417A185B": ("Running On-Demand P instances", "P", "on-demand"),
    "L-DB2E81BA": ("Running On-Demand G and VT instances", "G", "on-demand"),
    "L-7212CCBC": ("All P4, P3 and P2 Spot Instance Requests", "P", "spot"),
    "L-3819A6DF": ("All G and VT Spot Instance Requests", "G", "spot"),
}


# ---- SQS ------------------------------------------------------------------------------------------------------------
def get_queue_url(call: Call) -> dict[str, Any]:
    """Where the queue of events is."""
    _same_queue(call.region, call.params["QueueName"])
    return {"QueueUrl": f"https://sqs.{call.region.name}.amazonaws.com/000000000001/{call.region.queue}"}


def receive_message(call: Call) -> dict[str, Any]:
    """Up to ten events that are not hidden; they are hidden from now on until they are deleted or the time is over."""
    region, params = call.region, call.params
    _same_queue(region, params["QueueUrl"])
    most = params.get("MaxNumberOfMessages", 1)
    if not 1 <= most <= MOST:
        raise Refusal("InvalidParameterValue", f"MaxNumberOfMessages {most}: need 1 to {MOST}")
    region.messages += [Message(region.new_id("m"), each) for each in region.notices]
    region.notices.clear()
    taken = [each for each in region.messages if each.hidden_until_s <= call.now_s][:most]
    for each in taken:
        each.hidden_until_s = call.now_s + params.get("VisibilityTimeout", VISIBLE_AFTER_S)
        each.receipt = region.new_id("receipt")
    return {"Messages": [_message(each) for each in taken]} if taken else {}


def delete_message(call: Call) -> dict[str, Any]:
    """It does not come again."""
    _same_queue(call.region, call.params["QueueUrl"])
    _delete(call.region, call.params["ReceiptHandle"])
    return {}


def delete_message_batch(call: Call) -> dict[str, Any]:
    """They do not come again."""
    _same_queue(call.region, call.params["QueueUrl"])
    entries = call.params["Entries"]
    if not 1 <= len(entries) <= MOST:
        raise Refusal("AWS.SimpleQueueService.TooManyEntriesInBatchRequest", f"{len(entries)} entries")
    for each in entries:
        _delete(call.region, each["ReceiptHandle"])
    return {"Successful": [{"Id": each["Id"]} for each in entries], "Failed": []}


def _same_queue(region: Region, queue: str) -> None:
    if queue.rsplit("/", 1)[-1] != region.queue:
        raise Refusal("AWS.SimpleQueueService.NonExistentQueue", "The specified queue does not exist.")


def _delete(region: Region, receipt: str) -> None:
    region.messages = [each for each in region.messages if each.receipt != receipt]


def _message(each: Message) -> dict[str, Any]:
    body = json.dumps(each.event)
    digest = hashlib.md5(body.encode(), usedforsecurity=False).hexdigest()
    return {"MessageId": each.message_id, "ReceiptHandle": each.receipt, "MD5OfBody": digest, "Body": body}


# ---- Service Quotas, STS --------------------------------------------------------------------------------------------
def get_service_quota(call: Call) -> dict[str, Any]:
    """One limit."""
    code = call.params["QuotaCode"]
    if call.params["ServiceCode"] != "ec2" or code not in QUOTAS:
        raise Refusal("NoSuchResourceException", f"The request failed: no quota {code}")
    return {"Quota": _quota(call.region, code)}


def list_service_quotas(call: Call) -> dict[str, Any]:
    """All limits of EC2 that are known here."""
    if call.params["ServiceCode"] != "ec2":
        raise Refusal("NoSuchResourceException", "only ec2 has quotas here")
    return {"Quotas": [_quota(call.region, code) for code in QUOTAS]}


def _quota(region: Region, code: str) -> dict[str, Any]:
    name, family, market = QUOTAS[code]
    value = float(region.quotas.get((family, market), 1_000_000))
    return {"ServiceCode": "ec2", "QuotaCode": code, "QuotaName": name, "Value": value, "Unit": "None"}


def get_caller_identity(_call: Call) -> dict[str, Any]:
    """The account."""
    return {"UserId": "AIDATEST", "Account": "000000000001", "Arn": "arn:aws:iam::000000000001:user/quartermaster"}


SQS: Mapping[str, Action] = {
    "GetQueueUrl": get_queue_url,
    "ReceiveMessage": receive_message,
    "DeleteMessage": delete_message,
    "DeleteMessageBatch": delete_message_batch,
}
SERVICE_QUOTAS: Mapping[str, Action] = {
    "GetServiceQuota": get_service_quota,
    "ListServiceQuotas": list_service_quotas,
}
STS: Mapping[str, Action] = {"GetCallerIdentity": get_caller_identity}

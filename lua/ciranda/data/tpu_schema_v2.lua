--- The Cloud TPU API, version v2, as data: every message with its fields, every method with its HTTP form.
--
-- Source: the client that Google Cloud SDK 578.0.0 carries for this version, which Google generates from the API's
-- discovery document; compared with the public discovery document of 2026-10-01, which added what says 2026. One entry
-- here is one entry there. A field's value is its type:
--
--   "string" "bool" "int32" "float"   as JSON has them
--   "int64"                           a string of digits in JSON (proto3), a number or a string on input
--   "timestamp" "duration"            RFC 3339 with Z; seconds with an s, as in "3600s". Both are strings in the
--                                     source, told apart by the field's name (...Time, ...Timestamp; ...Duration)
--   "any"                             a JSON object with fields of its own (google.protobuf.Any or Struct)
--   "Name"                            the message Name
--   { "A", "B" }                      an enum; the first value is the default, which is never sent
--   "T[]" "T{}"                       a list of T; a map from strings to T
--
-- Left out are the request messages of the source, whose fields are a method's `query` and `body` here, and the
-- generated wrappers of maps. `path` is without the version; a variable in braces stands for one segment.
--
-- To follow a newer API: apply the same rules to its discovery document (schemas -> messages, resources.*.methods ->
-- methods, `httpMethod` -> verb, `flatPath` -> path, query parameters -> query, `request.$ref` -> body). The spec
-- tests/spec/sim/schema_spec.lua checks that every name used here is defined.

-- stylua: ignore
return {
  version = "v2",
  messages = {
    AcceleratorConfig = {
      topology = "string",
      type = { "TYPE_UNSPECIFIED", "V2", "V3", "V4", "V5LITE_POD", "V5P", "V6E" },
    },
    AcceleratorType = { acceleratorConfigs = "AcceleratorConfig[]", name = "string", type = "string" },
    AcceptedData = {},
    AccessConfig = { externalIp = "string" },
    ActiveData = {},
    AttachedDisk = {
      sourceDisk = "string",
      mode = { "DISK_MODE_UNSPECIFIED", "READ_WRITE", "READ_ONLY" },
    },
    BootDiskConfig = { customerEncryptionKey = "CustomerEncryptionKey" },
    CreatingData = {},
    CustomerEncryptionKey = { kmsKeyName = "string" },
    DeletingData = {},
    Empty = {},
    FailedData = { error = "Status" },
    GenerateServiceIdentityRequest = {},
    GenerateServiceIdentityResponse = { identity = "ServiceIdentity" },
    GetGuestAttributesRequest = { queryPath = "string", workerIds = "string[]" },
    GetGuestAttributesResponse = { guestAttributes = "GuestAttributes[]" },
    Guaranteed = { minDuration = "duration" },
    GuestAttributes = { queryPath = "string", queryValue = "GuestAttributesValue" },
    GuestAttributesEntry = { key = "string", namespace = "string", value = "string" },
    GuestAttributesValue = { items = "GuestAttributesEntry[]" },
    Interval = { endTime = "timestamp", startTime = "timestamp" },
    ListAcceleratorTypesResponse = {
      acceleratorTypes = "AcceleratorType[]", nextPageToken = "string", unreachable = "string[]",
    },
    ListLocationsResponse = { locations = "Location[]", nextPageToken = "string" },
    ListNodesResponse = { nextPageToken = "string", nodes = "Node[]", unreachable = "string[]" },
    ListOperationsResponse = {
      nextPageToken = "string", operations = "Operation[]", unreachable = "string[]", -- 2026: unreachable
    },
    ListQueuedResourcesResponse = {
      nextPageToken = "string", queuedResources = "QueuedResource[]", unreachable = "string[]",
    },
    ListRuntimeVersionsResponse = {
      nextPageToken = "string", runtimeVersions = "RuntimeVersion[]", unreachable = "string[]",
    },
    Location = {
      displayName = "string", labels = "string{}", locationId = "string", metadata = "any",
      name = "string",
    },
    MultisliceParams = { nodeCount = "int32", nodeIdPrefix = "string" },
    NetworkConfig = {
      canIpForward = "bool", enableExternalIps = "bool", network = "string", queueCount = "int32",
      subnetwork = "string",
    },
    NetworkEndpoint = { accessConfig = "AccessConfig", ipAddress = "string", port = "int32" },
    Node = {
      acceleratorConfig = "AcceleratorConfig", acceleratorType = "string",
      bootDiskConfig = "BootDiskConfig", cidrBlock = "string", createTime = "timestamp",
      dataDisks = "AttachedDisk[]", description = "string", healthDescription = "string", id = "int64",
      labels = "string{}", metadata = "string{}", multisliceNode = "bool", name = "string",
      networkConfig = "NetworkConfig", networkConfigs = "NetworkConfig[]",
      networkEndpoints = "NetworkEndpoint[]", queuedResource = "string", runtimeVersion = "string",
      schedulingConfig = "SchedulingConfig", serviceAccount = "ServiceAccount",
      shieldedInstanceConfig = "ShieldedInstanceConfig", symptoms = "Symptom[]", tags = "string[]",
      upcomingMaintenance = "UpcomingMaintenance",
      apiVersion = { "API_VERSION_UNSPECIFIED", "V1_ALPHA1", "V1", "V2_ALPHA1", "V2" },
      health = {
        "HEALTH_UNSPECIFIED", "HEALTHY", "TIMEOUT", "UNHEALTHY_TENSORFLOW", "UNHEALTHY_MAINTENANCE",
      },
      protectionTier = { "PROTECTION_TIER_UNSPECIFIED", "STANDARD", "CAPACITY_OPTIMIZED" }, -- 2026
      state = {
        "STATE_UNSPECIFIED", "CREATING", "READY", "RESTARTING", "REIMAGING", "DELETING", "REPAIRING",
        "STOPPED", "STOPPING", "STARTING", "PREEMPTED", "TERMINATED", "HIDING", "HIDDEN", "UNHIDING",
        "UNKNOWN",
      },
    },
    NodeSpec = { multisliceParams = "MultisliceParams", node = "Node", nodeId = "string", parent = "string" },
    Operation = { done = "bool", error = "Status", metadata = "any", name = "string", response = "any" },
    OperationMetadata = {
      apiVersion = "string", cancelRequested = "bool", createTime = "timestamp", endTime = "timestamp",
      statusDetail = "string", target = "string", verb = "string",
    },
    ProvisioningData = {},
    QueuedResource = {
      createTime = "timestamp", guaranteed = "Guaranteed", name = "string",
      queueingPolicy = "QueueingPolicy", reservationName = "string", spot = "Spot",
      state = "QueuedResourceState", tpu = "Tpu",
    },
    QueuedResourceState = {
      acceptedData = "AcceptedData", activeData = "ActiveData", creatingData = "CreatingData",
      deletingData = "DeletingData", failedData = "FailedData", provisioningData = "ProvisioningData",
      suspendedData = "SuspendedData", suspendingData = "SuspendingData",
      state = {
        "STATE_UNSPECIFIED", "CREATING", "ACCEPTED", "PROVISIONING", "FAILED", "DELETING", "ACTIVE",
        "SUSPENDING", "SUSPENDED", "WAITING_FOR_RESOURCES",
      },
      stateInitiator = { "STATE_INITIATOR_UNSPECIFIED", "USER", "SERVICE" },
    },
    QueueingPolicy = {
      validAfterDuration = "duration", validAfterTime = "timestamp", validInterval = "Interval",
      validUntilDuration = "duration", validUntilTime = "timestamp",
    },
    ResetQueuedResourceRequest = {},
    RuntimeVersion = { name = "string", version = "string" },
    SchedulingConfig = { preemptible = "bool", reserved = "bool", spot = "bool" },
    ServiceAccount = { email = "string", scope = "string[]" },
    ServiceIdentity = { email = "string" },
    ShieldedInstanceConfig = { enableSecureBoot = "bool" },
    Spot = {},
    StartNodeRequest = {},
    Status = { code = "int32", details = "any[]", message = "string" },
    StopNodeRequest = {},
    SuspendedData = {},
    SuspendingData = {},
    Symptom = {
      createTime = "timestamp", details = "string", workerId = "string",
      symptomType = {
        "SYMPTOM_TYPE_UNSPECIFIED", "LOW_MEMORY", "OUT_OF_MEMORY", "EXECUTE_TIMED_OUT", "MESH_BUILD_FAIL",
        "HBM_OUT_OF_MEMORY", "PROJECT_ABUSE",
      },
    },
    Tpu = { nodeSpec = "NodeSpec[]" },
    UpcomingMaintenance = {
      canReschedule = "bool", latestWindowStartTime = "string", windowEndTime = "string",
      windowStartTime = "string",
      maintenanceStatus = { "UNKNOWN", "PENDING", "ONGOING" },
      type = { "UNKNOWN_TYPE", "SCHEDULED", "UNSCHEDULED" },
    },
  },
  methods = {
    ["acceleratorTypes.get"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/acceleratorTypes/{acceleratorType}",
      response = "AcceleratorType",
    },
    ["acceleratorTypes.list"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/acceleratorTypes",
      query = { filter = "string", orderBy = "string", pageSize = "int32", pageToken = "string" },
      response = "ListAcceleratorTypesResponse",
    },
    ["nodes.create"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}/nodes",
      query = { nodeId = "string" },
      body = "Node",
      response = "Operation",
    },
    ["nodes.delete"] = {
      verb = "DELETE",
      path = "projects/{project}/locations/{location}/nodes/{node}",
      response = "Operation",
    },
    ["nodes.get"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/nodes/{node}",
      response = "Node",
    },
    ["nodes.getGuestAttributes"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}/nodes/{node}:getGuestAttributes",
      body = "GetGuestAttributesRequest",
      response = "GetGuestAttributesResponse",
    },
    ["nodes.list"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/nodes",
      query = { pageSize = "int32", pageToken = "string" },
      response = "ListNodesResponse",
    },
    ["nodes.patch"] = {
      verb = "PATCH",
      path = "projects/{project}/locations/{location}/nodes/{node}",
      query = { updateMask = "string" },
      body = "Node",
      response = "Operation",
    },
    ["nodes.start"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}/nodes/{node}:start",
      body = "StartNodeRequest",
      response = "Operation",
    },
    ["nodes.stop"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}/nodes/{node}:stop",
      body = "StopNodeRequest",
      response = "Operation",
    },
    ["operations.cancel"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}/operations/{operation}:cancel",
      response = "Empty",
    },
    ["operations.delete"] = {
      verb = "DELETE",
      path = "projects/{project}/locations/{location}/operations/{operation}",
      response = "Empty",
    },
    ["operations.get"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/operations/{operation}",
      response = "Operation",
    },
    ["operations.list"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/operations",
      query = { -- 2026: returnPartialSuccess
        filter = "string", pageSize = "int32", pageToken = "string", returnPartialSuccess = "bool",
      },
      response = "ListOperationsResponse",
    },
    ["queuedResources.create"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}/queuedResources",
      query = { queuedResourceId = "string", requestId = "string" },
      body = "QueuedResource",
      response = "Operation",
    },
    ["queuedResources.delete"] = {
      verb = "DELETE",
      path = "projects/{project}/locations/{location}/queuedResources/{queuedResource}",
      query = { force = "bool", requestId = "string" },
      response = "Operation",
    },
    ["queuedResources.get"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/queuedResources/{queuedResource}",
      response = "QueuedResource",
    },
    ["queuedResources.list"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/queuedResources",
      query = { pageSize = "int32", pageToken = "string" },
      response = "ListQueuedResourcesResponse",
    },
    ["queuedResources.reset"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}/queuedResources/{queuedResource}:reset",
      body = "ResetQueuedResourceRequest",
      response = "Operation",
    },
    ["runtimeVersions.get"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/runtimeVersions/{runtimeVersion}",
      response = "RuntimeVersion",
    },
    ["runtimeVersions.list"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}/runtimeVersions",
      query = { filter = "string", orderBy = "string", pageSize = "int32", pageToken = "string" },
      response = "ListRuntimeVersionsResponse",
    },
    ["locations.generateServiceIdentity"] = {
      verb = "POST",
      path = "projects/{project}/locations/{location}:generateServiceIdentity",
      body = "GenerateServiceIdentityRequest",
      response = "GenerateServiceIdentityResponse",
    },
    ["locations.get"] = {
      verb = "GET",
      path = "projects/{project}/locations/{location}",
      response = "Location",
    },
    ["locations.list"] = {
      verb = "GET",
      path = "projects/{project}/locations",
      query = { extraLocationTypes = "string[]", filter = "string", pageSize = "int32", pageToken = "string" },
      response = "ListLocationsResponse",
    },
  },
}
